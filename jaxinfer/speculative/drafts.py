"""All drafts in one place."""

from jaxinfer.speculative.model_draft import ModelDraft as ModelDraft
from jaxinfer.speculative.ngram import NgramDraft as NgramDraft
from jaxinfer.speculative.proposer import Draft as Draft
from jaxinfer.speculative.proposer import Proposer as Proposer
from jaxinfer.speculative.self_draft import SelfDraft as SelfDraft

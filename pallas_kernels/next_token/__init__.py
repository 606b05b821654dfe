"""From a pass's logits to what the next pass over one sequence begins with, in one kernel."""

from pallas_kernels.next_token.api import Begun, next_token, next_token_refusal

__all__ = ["Begun", "next_token", "next_token_refusal"]

"""lm-evaluation-harness with jaxinfer among its models, for releases that do not look for entry points (to 0.4.13).

python -m jaxinfer.evaluation run --model jaxinfer --model_args pretrained=smollm2-135m-instruct --tasks arc_easy
"""

import sys

try:
    from lm_eval.__main__ import cli_evaluate
except ImportError as error:
    sys.exit(f"error: {error}; the harness comes with: pip install 'jaxinfer[eval]'")

import jaxinfer.evaluation.lm_eval  # noqa: F401  (registers the model)

if __name__ == "__main__":
    cli_evaluate()

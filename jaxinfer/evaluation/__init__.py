"""Evaluation: the adapter for lm-evaluation-harness (`pip install 'jaxinfer[eval]'`)."""

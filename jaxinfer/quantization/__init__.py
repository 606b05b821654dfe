"""Quantising weights: plans that say which weight gets which precision, and the methods that choose codes."""

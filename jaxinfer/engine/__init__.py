"""The engine: continuous batching over one pool of cache pages, with prefill and decode as separate kinds of work."""

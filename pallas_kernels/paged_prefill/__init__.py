"""Attention of a chunk of new tokens over paged keys and values, its own included."""

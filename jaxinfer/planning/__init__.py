"""How much memory a model will take, found out without loading it."""

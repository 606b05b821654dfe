"""Pure functions, one idea a file. Every function takes arrays and returns arrays; none holds state."""

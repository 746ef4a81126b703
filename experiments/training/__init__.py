"""How it is trained: the plain loop, the fused engine, and what is kept on disk meanwhile."""

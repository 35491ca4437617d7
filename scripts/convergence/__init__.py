"""Convergence: arms trained on the same tokens, their loss against bytes and against time on metered links."""

"""Kernels of our own for CPUs: C, compiled once on first use where a compiler is at hand.

`build` compiles and finds them, `calls` hands tensors to them. Whoever computes asks `calls.kernels()`: None where
there are none, and torch's own operations do the same work in more passes.
"""

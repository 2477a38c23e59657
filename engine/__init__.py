"""The embedded engine: GGUF in, plan, prefill and greedy decode on CUDA or NumPy. It knows nothing of the harness."""

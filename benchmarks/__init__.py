"""Side by side with peers: each benchmark is one command, and writes its table into docs/benchmarks.md."""

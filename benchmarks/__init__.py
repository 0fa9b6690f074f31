"""Latency of shmemar's collectives. ``mpirun -n 4 python -m benchmarks allreduce``."""

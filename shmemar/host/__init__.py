"""What runs around a kernel: start-up, memory, launch, and the communicator that users hold."""

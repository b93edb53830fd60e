"""What is put into a frozen model: bottlenecks, erasers, the guard, and their files."""

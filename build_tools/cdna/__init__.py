"""Compile HIP for gfx942 and gfx950, and run the code objects on a CPU. See README.md."""

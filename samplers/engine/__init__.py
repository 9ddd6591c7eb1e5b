"""Many requests through one compiled program: the engine, its program of slots, and the compiled step."""

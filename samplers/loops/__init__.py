"""One file per decoding loop: blocks, D2F's pipeline, left to right with a verifier, re-noising."""

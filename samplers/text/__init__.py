"""From text to padded prompts, from token ids to text."""

"""What the commands of all packages share: how options are written, and how a command ends."""

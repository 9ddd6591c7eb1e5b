"""What the commands of all rooms share: how options are written, and how a command line ends."""

"""Several devices and several hosts: sharding rules and agreement between processes."""

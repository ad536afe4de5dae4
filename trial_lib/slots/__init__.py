"""Slots and ports of this host. Locks hold them, so that no two studies use one."""

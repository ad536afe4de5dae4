"""Slots and ports of this host, held by locks so that no two studies use one."""

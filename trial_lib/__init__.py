"""Everything ZeroTune knows, apart from the order of work: it imports neither flows, tasks nor Prefect."""

"""Planning for devices that are not here: from the arguments of a plan to its folder."""

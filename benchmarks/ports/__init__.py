"""Public programs of both frameworks, written anew in small, before and after they were moved onto the packages."""

"""``python -m jaxddp``: the commands. Their modules import slow ones only when they run, so help is quick."""

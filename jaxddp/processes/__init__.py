"""The processes of a job: finding it, joining it, and ending together. ``torchref`` uses the same files.

job.py           the job that a launcher describes: torchrun, SLURM, Open MPI, or addresses by hand
roll_call.py     all processes say that they are there, and compare what must be alike
start.py         ``start_process``: joins JAX to the job; the only file that imports JAX
replicas.py      the error if ranks differ in what each has in full
watchdog.py      ends all processes when one is lost
stderr.py        whole lines to standard error
"""

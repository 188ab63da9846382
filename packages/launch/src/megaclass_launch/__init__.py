"""Starts, watches and ends the processes of a distributed training job. Needs the standard library only; ranks/ needs torch.

command.py, options.py   the command line of a job; launchers/ has a module per way to start its processes
driver/, agent/          one driver per job, one agent per host; wire/ is what they say to each other
elastic.py               the place of a rank in a job whose hosts come and go
hang/, check/            which rank hangs, and whether a cluster can train
rendezvous/              addresses, the job's secret, where ranks find rank 0
world.py                 ranks as each starter names them
ranks/                   what the ranks themselves need of torch: store, process group, collectives, wire formats
"""

__version__ = "0.2.0"

"""What a run costs: parameters, bytes, peak memory, time and throughput, measured from the run itself.

parameters.py   counted by the true tensors
memory.py       the most memory in use above the idle process
speed.py        examples per second, with repetitions, mean and spread
"""

"""Runs of two processes: flags and variables by launcher, as functions of (port, rank)."""


def finish(processes, seconds=100):
    """Waits for the processes to end, and returns what each printed to stderr."""
    try:
        return [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


def by_hand(port, rank):
    return [f'--coordinator=localhost:{port}', '--num_processes=2', f'--process_id={rank}'], {}


def slurm(port, rank):
    """Variables that srun -n 2 sets, and the port, which the job's number would otherwise give."""
    step = {
        'SLURM_JOB_ID': '7',
        'SLURM_STEP_NODELIST': 'localhost',
        'SLURM_NTASKS': '2',
        'SLURM_STEP_NUM_TASKS': '2',
    }
    task = {
        'SLURM_PROCID': str(rank),
        'SLURM_LOCALID': str(rank),
        'SLURM_NODEID': '0',
        'SLURM_STEP_TASKS_PER_NODE': '2',
    }
    return [], step | task | {'JAX_COORDINATOR_PORT': str(port)}


def open_mpi(port, rank):
    """Variables that mpirun -n 2 of Open MPI 4 sets inside a SLURM job."""
    world = {
        'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://127.0.0.1,10.148.0.1:34911',
        'OMPI_COMM_WORLD_SIZE': '2',
    }
    own = {
        'OMPI_COMM_WORLD_RANK': str(rank),
        'OMPI_COMM_WORLD_LOCAL_RANK': str(rank),
        'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
    }
    return [], slurm(port, 0)[1] | {'SLURM_NTASKS': '1', 'SLURM_STEP_NUM_TASKS': '1'} | world | own

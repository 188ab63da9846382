import os


class LSFUtils:
    @staticmethod
    def using_lsf() -> bool:
        return "LSB_JOBID" in os.environ

from settings import *  # noqa: F403

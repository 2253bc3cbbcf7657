from settings import *

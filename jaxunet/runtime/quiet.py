"""Makes Ctrl-C end a command quietly while it imports the rest; commands import this first."""

from jaxunet.runtime.interrupt import quiet_while_importing

quiet_while_importing()

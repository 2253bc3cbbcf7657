"""Completion in shells: commands, the names of recipes, and the fields of a config."""

from __future__ import annotations

from collections.abc import Iterable

from jaxunet.config import recipes
from jaxunet.config.schema import Config, by_path

SHELLS = ('bash', 'zsh')
# Bash splits words at "=", zsh does not. Where a word is nothing of this, the shell offers files.
BASH = """_jaxunet() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
  local recipes='RECIPES'
  COMPREPLY=()
  if [ "$before" = = ]; then before=${COMP_WORDS[COMP_CWORD-2]}; fi
  if [ "$word" = = ]; then word=; fi
  case $word in --config=*)
    COMPREPLY=($(compgen -P --config= -W "$recipes" -- "${word#--config=}"))
    return ;;
  esac
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W 'COMMANDS' -- "$word"))
  elif [ "$before" = --config ]; then
    COMPREPLY=($(compgen -W "$recipes" -- "$word"))
  elif [ "${word#--config.}" != "$word" ]; then
    COMPREPLY=($(compgen -P --config. -S = -W 'FIELDS' -- "${word#--config.}"))
    compopt -o nospace 2> /dev/null
  fi
}
complete -o default -F _jaxunet jaxunet"""
ZSH = 'autoload -Uz compinit bashcompinit && compinit && bashcompinit\n'


def script(shell: str, commands: Iterable[str]) -> str:
    """Returns the text that completes `jaxunet` in a shell of `SHELLS`, which `eval` reads."""
    text = BASH
    for name, words in (
        ('COMMANDS', commands),
        ('RECIPES', recipes.names()),
        ('FIELDS', by_path(Config())),  # their paths, such as data.path
    ):
        text = text.replace(f"'{name}'", f"'{' '.join(words)}'")
    if shell == 'bash':
        return text
    return ZSH + text.replace('complete -o', 'complete -o nospace -o')  # it has no compopt

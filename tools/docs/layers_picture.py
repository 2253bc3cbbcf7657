"""The picture of the layers, docs/architecture.svg, drawn from the contract in pyproject.toml."""

from __future__ import annotations

import html
import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
PICTURE = ROOT / 'docs/architecture.svg'
CONTRACT = 'Data flows one way'
# The role of each layer, by its first package.
ROLES = {
    'train': 'commands: parse flags, call a package, print',
    'api': 'the same from Python',
    'compare': 'methods at equal training time',
    'sweep': 'many settings, one process each',
    'profile': 'where the time of a step goes',
    'benchmark': 'steps and kernels, side by side',
    'training': 'session, step, update, loop',
    'sampling': 'samplers and the generator',
    'metrics': 'FID and others; state on disk',
    'weights': 'files of other programs',
    'data': 'images; the UNet; the diffusion process',
    'ops': 'vocabulary, references, choice of a backend',
    'config': 'fields, checks, command line',
    'runtime': 'errors, devices, processes, plug-ins',
}
LEFT, WIDTH, ROW, BOX = 230, 490, 46, 30
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="13"'


def layers() -> list[list[str]]:
    """The rooms of each layer, from the top, by their names inside jaxunet."""
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())
    contracts = project['tool']['importlinter']['contracts']
    (layers_text,) = [c['layers'] for c in contracts if c['name'] == CONTRACT]
    return [
        [room.strip().removeprefix('jaxunet.') for room in line.split('|')] for line in layers_text
    ]


def layers_picture() -> str:
    """The SVG: one row of boxes per layer, arrows down, and the kernel packages beside `ops`."""
    rows = layers()
    height = ROW * len(rows) + 20
    parts = []
    for i, rooms in enumerate(rows):
        y = 10 + i * ROW
        step = WIDTH / len(rooms)
        parts += [_box(LEFT + j * step, y, step - 6, room) for j, room in enumerate(rooms)]
        parts.append(_text(LEFT + WIDTH + 10, y, ROLES[rooms[0]], 'start', '#555'))
        if i + 1 < len(rows):
            x = LEFT + WIDTH / 2
            parts.append(_arrow(x, y + BOX, x, y + ROW - 2))
    middle = {rooms[0]: 10 + i * ROW + BOX / 2 for i, rooms in enumerate(rows)}
    top = middle['ops'] - 2 * ROW
    parts.append(_box(10, top, 150, '', 'none', 2.5 * ROW))
    parts.append(_text(20, top, 'kernel packages,', 'start', '#555'))
    parts.append(_text(20, top + 18, 'found as entry points', 'start', '#555'))
    for i, name in enumerate(('pallas_kernels', 'xla_ffi')):
        parts.append(_box(20, top + 46 + i * 34, 130, name, '#e8f1e4', 26))
    parts.append(_arrow(160, middle['ops'], LEFT - 2, middle['ops']))
    parts.append(_arrow(85, top + 2.5 * ROW, LEFT - 2, middle['runtime']))
    body = '\n'.join(parts)
    width = LEFT + WIDTH + 310
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def _box(
    x: float, y: float, width: float, label: str, fill: str = '#e4ecf7', height: float = BOX
) -> str:
    rectangle = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
        f'fill="{fill}" stroke="#555"/>'
    )
    return f'{rectangle}\n{_text(x + width / 2, y, label, "middle", "black")}'


def _text(x: float, y: float, text: str, anchor: str, colour: str) -> str:
    return (
        f'<text x="{x:g}" y="{y + 19:g}" text-anchor="{anchor}" fill="{colour}" {FONT}>'
        f'{html.escape(text)}</text>'
    )


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="#555" '
        'marker-end="url(#head)"/>'
    )

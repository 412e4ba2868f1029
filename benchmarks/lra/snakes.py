"""Placement of the dashes of Pathfinder images, compiled by Numba.

An image is a function of one 64-bit key: its random words are w(n) = splitmix64(key ^ n), and everything except the
ink is integer arithmetic, so images are equal on every machine.

Two snakes grow in turn, a dash at a time, without touching; when one is stuck, both start again. Distractors are
shorter snakes, placed with a few tries each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

# splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)
GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER, SECOND_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
HALF_WORD = np.uint64(32)

# tries to seed a snake, and to add a dash
TRIES = 3
# tries to place a distractor
DISTRACTOR_TRIES = 5
# room is 0 .. 255: a pixel is free up to 0.3, two dashes collide where they take 1.8 together
FREE = 76
COLLISION = 459
# a snake is stuck when all weights together are below 0.0001
STUCK = 1671
# random pixels tried before the whole image is searched for a free one
GUESSES = 64
# pairs of snakes begun before giving up; the hardest preset of Long Range Arena needs 4,000 on average
ATTEMPTS = 1_000_000
N_SEEDS = 360


class Rules(NamedTuple):
    """size: pixels per side; border: pixels without first target paddles; padding: pixels without dashes."""

    size: int
    border: int
    padding: int
    shortest_seed_distance: int
    longest_seed_distance: int
    contour_length: int
    distractor_length: int
    n_distractors: int


@njit(cache=True, nogil=True)
def mix(word):
    """splitmix64 of a word or of an array of words."""
    word = word + GAMMA
    word = (word ^ (word >> np.uint64(30))) * FIRST_MULTIPLIER
    word = (word ^ (word >> np.uint64(27))) * SECOND_MULTIPLIER
    return word ^ (word >> np.uint64(31))


@njit(cache=True, nogil=True)
def below(stream, bound):
    """A random number 0 .. bound - 1, bound at most 2**32. stream: uint64 (2,), key and number of words read."""
    word = mix(stream[0] ^ stream[1])
    stream[1] += np.uint64(1)
    return np.int64(((word >> HALF_WORD) * np.uint64(bound)) >> HALF_WORD)


@njit(cache=True, nogil=True)
def is_inside(size, y, x):
    return 0 <= y < size and 0 <= x < size


@njit(cache=True, nogil=True)
def stamp(room, template, y, x):
    """room = max(room, template) around (y, x)."""
    size, reach = room.shape[0], template.shape[0] // 2
    for i in range(max(0, y - reach), min(size, y + reach + 1)):
        for j in range(max(0, x - reach), min(size, x + reach + 1)):
            room[i, j] = max(room[i, j], template[i - y + reach, j - x + reach])


@njit(cache=True, nogil=True)
def collides(room, template, y, x):
    size, reach = room.shape[0], template.shape[0] // 2
    for i in range(max(0, y - reach), min(size, y + reach + 1)):
        for j in range(max(0, x - reach), min(size, x + reach + 1)):
            if np.int64(room[i, j]) + np.int64(template[i - y + reach, j - x + reach]) >= COLLISION:
                return True
    return False


@njit(cache=True, nogil=True)
def is_free(room, footprint, n_pixels, border, y, x):
    """Whether the part of the footprint inside the image is free and outside the border."""
    size = room.shape[0]
    for pixel in range(n_pixels):
        i, j = y + footprint[pixel, 0], x + footprint[pixel, 1]
        if not is_inside(size, i, j):
            continue
        if room[i, j] > FREE or not (border <= i < size - border and border <= j < size - border):
            return False
    return True


@njit(cache=True, nogil=True)
def free_pixel(room, footprint, n_pixels, border, edge, stream):
    """(y, x), uniform among the free pixels, or (-1, -1). edge: pixels at each side where none can be free."""
    size = room.shape[0]
    if n_pixels < 0:
        return -1, -1
    width = size - 2 * edge
    if width <= 0:
        return -1, -1
    for _ in range(GUESSES):
        y, x = edge + below(stream, width), edge + below(stream, width)
        if is_free(room, footprint, n_pixels, border, y, x):
            return y, x
    n_free, found_y, found_x = 0, -1, -1
    for y in range(edge, size - edge):
        for x in range(edge, size - edge):
            if is_free(room, footprint, n_pixels, border, y, x):
                n_free += 1
                if below(stream, n_free) == 0:
                    found_y, found_x = y, x
    return found_y, found_x


@njit(cache=True, nogil=True)
def fits(tables, paddle, size, y, x):
    """Whether head and pivot of a first paddle with its tail at (y, x) are inside the image."""
    head, pivot = tables.seed_heads[paddle], tables.seed_pivots[paddle]
    return is_inside(size, y + head[0], x + head[1]) and is_inside(size, y + pivot[0], x + pivot[1])


@njit(cache=True, nogil=True)
def seed(tables, room, border, stream):
    """(paddle, y, x) of the first dash of a snake, or paddle -1."""
    # footprints reach at most a paddle's length
    edge = max(0, border - tables.rooms.shape[1] // 2)
    for _ in range(TRIES):
        paddle = below(stream, N_SEEDS)
        y, x = free_pixel(room, tables.footprints[paddle], tables.footprint_sizes[paddle], border, edge, stream)
        if y < 0:
            return -1, 0, 0
        if fits(tables, paddle, room.shape[0], y, x):
            return paddle, y, x
    return -1, 0, 0


@njit(cache=True, nogil=True)
def seed_nearby(tables, size, distance, origin_y, origin_x, stream):
    """(paddle, y, x) of a first dash at that distance from the origin, or paddle -1; ignores other dashes."""
    for _ in range(TRIES):
        paddle = below(stream, N_SEEDS)
        angle = below(stream, 360) * np.pi / 180
        y = origin_y + np.int64(np.rint(distance * math.sin(angle)))
        x = origin_x + np.int64(np.rint(distance * math.cos(angle)))
        if is_inside(size, y, x) and fits(tables, paddle, size, y, x):
            return paddle, y, x
    return -1, 0, 0


@njit(cache=True, nogil=True)
def extend(tables, room, snake, weights, stream):
    """Adds a dash to a snake: True, or False if it is stuck. weights: int64 (K,), scratch.

    snake  int64 (5,): its last paddle and where that was placed (y, x), its pivot (y, x); changed in place
    """
    size = room.shape[0]
    last, pivot_y, pivot_x = snake[0], snake[3] + tables.steps[snake[0], 0], snake[4] + tables.steps[snake[0], 1]
    total = 0
    for k in range(tables.heads.shape[0]):
        weights[k] = 0
        y, x = pivot_y + tables.heads[k, 0], pivot_x + tables.heads[k, 1]
        if tables.weights[last, k] == 0 or not is_inside(size, y, x):
            continue
        nearest = 0
        for pixel in range(tables.disc.shape[0]):
            i, j = y + tables.disc[pixel, 0], x + tables.disc[pixel, 1]
            if is_inside(size, i, j):
                nearest = max(nearest, np.int64(room[i, j]))
        weights[k] = (255 - nearest) * tables.weights[last, k]
        total += weights[k]
    if total < STUCK:
        return False
    for _ in range(TRIES):
        left, k = below(stream, total), 0
        while left >= weights[k]:
            left -= weights[k]
            k += 1
        y, x = pivot_y + tables.heads[k, 0], pivot_x + tables.heads[k, 1]
        if not collides(room, tables.rooms[N_SEEDS + k], y, x):
            snake[0], snake[1], snake[2], snake[3], snake[4] = N_SEEDS + k, y, x, pivot_y, pivot_x
            return True
    return False


@njit(cache=True, nogil=True)
def begin(tables, snake, paddle, y, x):
    snake[0], snake[1], snake[2] = paddle, y, x
    snake[3], snake[4] = y + tables.seed_pivots[paddle, 0], x + tables.seed_pivots[paddle, 1]


@njit(cache=True, nogil=True)
def grow_targets(tables, rules, room, snakes, weights, stream, dashes, tips):
    """Grows both target snakes: True, or False if one was stuck; then the caller restores the room.

    dashes  int64 (2, contour_length, 3): paddle, y, x;  tips  int64 (2, 2, 2): [origin or terminal, snake] -> y, x
    """
    paddle, y, x = seed(tables, room, rules.border, stream)
    if paddle < 0:
        return False
    begin(tables, snakes[0], paddle, y, x)
    choices = rules.longest_seed_distance - rules.shortest_seed_distance + 1
    distance = rules.shortest_seed_distance + (below(stream, choices) if choices > 1 else 0)
    paddle, y, x = seed_nearby(tables, rules.size, distance, y, x, stream)
    if paddle < 0:
        return False
    begin(tables, snakes[1], paddle, y, x)
    for s in range(2):
        dashes[s, 0] = snakes[s, :3]
        tips[0, s] = snakes[s, 1:3]
    for step in range(1, rules.contour_length):
        for s in range(2):
            paddle, y, x = snakes[s, 0], snakes[s, 1], snakes[s, 2]
            if not extend(tables, room, snakes[s], weights, stream):
                return False
            # the newest dash takes no room yet, since the next one touches it
            stamp(room, tables.rooms[paddle], y, x)
            dashes[s, step] = snakes[s, :3]
    for s in range(2):
        tips[1, s] = snakes[s, 1:3]
    # as in the original, the last dash of snake 0 takes no room
    stamp(room, tables.rooms[snakes[1, 0]], snakes[1, 1], snakes[1, 2])
    return True


@njit(cache=True, nogil=True)
def grow_distractor(tables, rules, room, snake, weights, stream, dashes):
    """One distractor: True, or False if it was stuck. dashes: int64 (distractor_length, 3)."""
    paddle, y, x = seed(tables, room, 1, stream)
    if paddle < 0:
        return False
    begin(tables, snake, paddle, y, x)
    dashes[0] = snake[:3]
    for step in range(1, rules.distractor_length):
        paddle, y, x = snake[0], snake[1], snake[2]
        if not extend(tables, room, snake, weights, stream):
            return False
        stamp(room, tables.rooms[paddle], y, x)
        dashes[step] = snake[:3]
    stamp(room, tables.rooms[snake[0]], snake[1], snake[2])
    return True


@njit(cache=True, nogil=True)
def place(tables, rules, room, before, stream, dashes, tips):
    """Places all dashes of one image; returns (pairs of snakes begun, dashes placed), 0 pairs if none fitted.

    before  as room, scratch: the room before an attempt
    dashes  int64 (2 contour_length + n_distractors distractor_length, 3): paddle, y, x; the two targets first
    """
    before[:] = 255
    inside = slice(rules.padding, rules.size - rules.padding)
    before[inside, inside] = 0
    room[:] = before
    snakes, weights = np.zeros((2, 5), dtype=np.int64), np.zeros(tables.heads.shape[0], dtype=np.int64)
    n_dashes = 2 * rules.contour_length
    targets = dashes[:n_dashes].reshape(2, rules.contour_length, 3)
    attempts = 1
    while not grow_targets(tables, rules, room, snakes, weights, stream, targets, tips):
        room[:] = before
        attempts += 1
        if attempts > ATTEMPTS:
            return 0, 0
    for _ in range(rules.n_distractors):
        # full: fewer than 1 free pixel in 100
        if 100 * (room <= FREE).sum() < rules.size * rules.size:
            break
        before[:] = room
        for _ in range(DISTRACTOR_TRIES):
            into = dashes[n_dashes : n_dashes + rules.distractor_length]
            if grow_distractor(tables, rules, room, snakes[0], weights, stream, into):
                n_dashes += rules.distractor_length
                break
            room[:] = before
    return attempts, n_dashes


@njit(cache=True, nogil=True)
def paint(image, template, level, y, x, reach):
    """image = max(image, level * template), with pixel (reach, reach) of the template at (y, x)."""
    size = image.shape[0]
    for i in range(max(0, y - reach), min(size, y - reach + template.shape[0])):
        for j in range(max(0, x - reach), min(size, x - reach + template.shape[1])):
            image[i, j] = max(image[i, j], level * template[i - y + reach, j - x + reach])


@njit(cache=True, nogil=True)
def quantize(image, out):
    """uint8, rounded down: 255 is 1, or the brightest pixel if that is above 1."""
    brightest = np.float32(1)
    for value in image.flat:
        brightest = max(brightest, value)
    for i in range(image.shape[0]):
        for j in range(image.shape[1]):
            out[i, j] = np.uint8(np.float32(255) * (image[i, j] / brightest))


@njit(cache=True, nogil=True)
def draw(tables, rules, keys, marker, levels, counterfactual, images, labels, markers, tips, attempts):
    """Draws images from keys, uint64 (n,). Word 0 of a key is reserved for the caller.

    levels  float32 (2,): ink of the targets, of the distractors
    images, labels, markers, tips, attempts  of pathfinder.Images; four versions if counterfactual, with markers at
            [origin 0, terminal 0], then [0, 1], [1, 0], [1, 1]. 0 attempts where none ever fitted
    """
    most = 2 * rules.contour_length + rules.n_distractors * rules.distractor_length
    side = tables.lines.shape[1]
    room = np.empty((rules.size, rules.size), dtype=np.uint8)
    before = np.empty_like(room)
    dashes, ends = np.zeros((most, 3), dtype=np.int64), np.zeros((2, 2, 2), dtype=np.int64)
    plain = np.empty((rules.size, rules.size), dtype=np.float32)
    marked = np.empty_like(plain)
    stream = np.zeros(2, dtype=np.uint64)
    for n in range(len(keys)):
        stream[0], stream[1] = keys[n], 1
        attempts[n], n_dashes = place(tables, rules, room, before, stream, dashes, ends)
        tips[n] = ends
        plain[:] = 0
        for d in range(n_dashes):
            level = levels[0] if d < 2 * rules.contour_length else levels[1]
            paint(plain, tables.lines[dashes[d, 0]], level, dashes[d, 1], dashes[d, 2], side // 2)
        choice = below(stream, 4)
        for version in range(images.shape[1]):
            origin, terminal = divmod(version if counterfactual else choice, 2)
            labels[n, version] = origin == terminal
            marked[:] = plain
            for end, snake in ((0, origin), (1, terminal)):
                y, x = ends[end, snake, 0], ends[end, snake, 1]
                markers[n, version, end, 0], markers[n, version, end, 1] = y, x
                paint(marked, marker, np.float32(1), y, x, marker.shape[0] // 2)
            quantize(marked, images[n, version])

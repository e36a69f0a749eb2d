"""The index's Lua: one lookup, and the writes that must be whole. `index_memory.py` is their twin.

Every script has the root's `mr:{root}:` as ARGV[1] and the key of its set of lives as KEYS[1]; all other keys are
made from the prefix, so they lie in the same slot. Blocks count from 0, lives from 1.
"""

from __future__ import annotations

# How a chain is read. An entry names the depth where its owner's unbroken run begins, so that "the owner has block i
# of a run from `at`" is true up to a depth and false beyond: it can be bisected. A hole that the index got by losing
# a field is passed over; the owner's lease judges.
_CHAIN = """
local prefix, joined = ARGV[1], ARGV[2]
local total = #joined / 16
local function hash(i) return string.sub(joined, 16 * i + 1, 16 * i + 16) end

local function last(low, high, holds)  -- the deepest i in [low, high) for which it holds; it does at `low`
  if holds(high - 1) then return high - 1 end
  high = high - 1
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if holds(middle) then low = middle else high = middle end
  end
  return low
end

local read = {}  -- by life, then block: what was read once
local function entry(name, i)
  local known = read[name]
  if not known then
    known = {}
    read[name] = known
  end
  if known[i] == nil then
    local packed = redis.call('HGET', prefix .. 'block:' .. name, hash(i))
    known[i] = packed and cmsgpack.unpack(packed)
  end
  return known[i]
end

local function traced(i, letter)
  for g = 0, 1 do
    local letters = redis.call('HGET', prefix .. 'was:' .. g, hash(i))
    if letters and string.find(letters, letter, 1, true) then return true end
  end
  return false
end

local function reach(name, at, top)  -- the end of the run that this life has from block `at` on
  local function holds(i)
    local found = entry(name, i)
    return found and found[3] <= at
  end
  if at >= top or not holds(at) then return at end
  return last(at, top, holds) + 1
end

-- Fields of blocks [low, high), the deepest first and `step` of them at once to begin with, until `take` says so.
local function scan(key, high, low, step, take)
  while high > low do
    local from = math.max(low, high - step)
    local names = {}
    for i = from, high - 1 do names[#names + 1] = hash(i) end
    local got = redis.call('HMGET', key, unpack(names))
    for i = #names, 1, -1 do
      if got[i] and take(from + i, got[i]) then return end
    end
    high, step = from, math.min(256, 4 * step)
  end
end
"""

# ARGV: prefix, all prefix hashes joined (as one word: two thousand cost the client milliseconds to send), how many
# of the lives are nodes, how many hits at most and how far below the first, how many runs and pieces at most, then
# the live NODE:EPOCHs: nodes, then workers.
MATCH = (
    _CHAIN
    + """
local num_nodes, hits_max, window = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local runs_max, pieces_max = tonumber(ARGV[6]), tonumber(ARGV[7])
local names, live = {}, {}
for i = 8, #ARGV do
  names[i - 7] = ARGV[i]
  live[ARGV[i]] = true
end
local gone
local function dead()  -- asked for only where the live ones' blocks end before the prompt does
  if not gone then
    gone = {}
    for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
      if not live[name] then gone[#gone + 1] = name end
    end
  end
  return gone
end

-- At each place the node whose run goes on the longest: the fewest runs; of equal ones the first that has its end in
-- memory. `skip`: as if that node were not there.
local function warm(n, i)
  local found = entry(names[n], i)
  return found and found[2] == 'host'
end
local function cover(skip)
  local runs, at = {}, 0
  while at < total and #runs < runs_max do
    local best, owner = at, 0
    for n = 1, num_nodes do
      local stop = n ~= skip and reach(names[n], at, total) or at
      if stop > best or (owner > 0 and stop == best and warm(n, stop - 1) and not warm(owner, stop - 1)) then
        best, owner = stop, n
      end
    end
    if owner == 0 then break end
    runs[#runs + 1] = {owner, at, best}
    at = best
  end
  return runs, at
end
local runs, depth = cover(0)
local skip = runs[1] and runs[1][1] or 0
local spare, spare_depth = {}, 0
if skip > 0 and num_nodes > 1 then spare, spare_depth = cover(skip) end

local function known(i)
  for _, list in ipairs({names, dead()}) do
    for _, name in ipairs(list) do
      if redis.call('HEXISTS', prefix .. 'block:' .. name, hash(i)) == 1 then return true end
    end
  end
  return traced(i, 'b')
end
local seen = depth
if depth < total and known(depth) then seen = last(depth, total, known) + 1 end
local stale = depth
if seen > depth then
  for _, name in ipairs(dead()) do stale = math.max(stale, reach(name, depth, seen)) end
end
local kept = stale
for w = num_nodes + 1, #names do kept = math.max(kept, reach(names[w], depth, seen)) end

local hits, devices, has_device, dead_cut = {}, {}, {}, 0
local function owner_of(i)
  for _, run in ipairs(runs) do
    if i < run[3] then return run[1] end
  end
  return 0
end
local function consider(cut, packed)
  local holders = cmsgpack.unpack(packed)
  local main, other
  for n = 1, num_nodes do
    if holders[names[n]] then
      main = main or n
      if n ~= skip then other = other or n end
    end
  end
  if main and cut <= depth and #hits < hits_max then
    local owner = owner_of(cut - 1)
    if holders[names[owner]] then main = owner end
    hits[#hits + 1] = {cut, main, 0}
  end
  if other and cut <= spare_depth and #hits < hits_max then hits[#hits + 1] = {cut, other, 1} end
  for w = num_nodes + 1, #names do
    if holders[names[w]] and not has_device[w] then
      local found = entry(names[w], cut - 1)
      if found and found[3] == 0 then
        has_device[w] = true
        devices[#devices + 1] = {w, cut}
      end
    end
  end
  if #hits == 0 and cut <= depth and cut > dead_cut then
    for name in pairs(holders) do
      if not live[name] then dead_cut = cut end
    end
  end
  return #hits > 0
end
scan(prefix .. 'cuts', seen, 0, 4, consider)  -- most prompts have one at their end
local best, gone_cut = hits[1] and hits[1][1] or 0, 0
scan(prefix .. 'cuts', best - 1, math.max(0, best - window), window, function(cut, packed)
  consider(cut, packed)
  return #hits >= hits_max
end)

if best < depth then
  for g = 0, 1 do
    scan(prefix .. 'was:' .. g, depth, math.max(best, gone_cut), 64, function(cut, letters)
      local there = string.find(letters, 's', 1, true)
      if there then gone_cut = cut end
      return there
    end)
  end
end

local diverged, empty = 0, 0
if seen > 0 and seen < total then
  if traced(seen - 1, 'p') then diverged = 1 end
  for _, list in ipairs({names, dead()}) do
    for _, name in ipairs(list) do
      local found = entry(name, seen - 1)
      if found and found[5] == 1 then diverged = 1 end
    end
  end
elseif seen == 0 and redis.call('EXISTS', KEYS[1], prefix .. 'was:0', prefix .. 'was:1') == 0 then
  empty = 1
end

local tiers = {}
for _, run in ipairs(runs) do
  local at, stop, pieces = run[2], math.min(run[3], best), 0
  local function tier(i)
    local found = entry(names[run[1]], i)
    return found and found[2] or 'host'
  end
  while at < stop do
    local here = tier(at)
    pieces = pieces + 1
    local upto = stop
    if pieces < pieces_max then upto = last(at, stop, function(i) return tier(i) == here end) + 1 end
    tiers[#tiers + 1] = {here, upto - at}
    at = upto
  end
end
return {depth, seen, stale, kept, dead_cut, gone_cut, diverged, empty, hits, devices, runs, spare, tiers}
"""
)

# Traces of what was evicted: letters b (a block), s (a snapshot), p (had a child) under its prefix hash. Two
# generations; the younger becomes the older when it is full or half its life is over, and then the older is dropped.
# ARGV: prefix, name, the entry keys' ttl and the traces' ttl in ms, the size of a generation.
_WRITE = """
local prefix, name = ARGV[1], ARGV[2]
local ttl_ms, trace_ttl_ms, trace_max = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local young, old = prefix .. 'was:0', prefix .. 'was:1'

local function trace(field, letters)
  local left = redis.call('PTTL', young)
  if left >= 0 and (2 * left < trace_ttl_ms or redis.call('HLEN', young) >= trace_max) then
    redis.call('RENAME', young, old)
    left = -2
  end
  local held = redis.call('HGET', young, field) or ''
  for letter in string.gmatch(letters, '.') do
    if not string.find(held, letter, 1, true) then held = held .. letter end
  end
  redis.call('HSET', young, field, held)
  if left < 0 then redis.call('PEXPIRE', young, trace_ttl_ms) end
end

local function holders(field)
  local packed = redis.call('HGET', prefix .. 'cuts', field)
  return packed and cmsgpack.unpack(packed) or {}
end

local function drop_snapshot(life, field)
  local held = holders(field)
  if redis.call('HDEL', prefix .. 'snap:' .. life, field) == 0 and not held[life] then return end
  trace(field, 's')
  held[life] = nil
  if next(held) then redis.call('HSET', prefix .. 'cuts', field, cmsgpack.pack(held))
  else redis.call('HDEL', prefix .. 'cuts', field) end
end

local function drop_life(life)
  for _, field in ipairs(redis.call('HKEYS', prefix .. 'snap:' .. life)) do drop_snapshot(life, field) end
  redis.call('UNLINK', prefix .. 'block:' .. life, prefix .. 'snap:' .. life)
  redis.call('SREM', KEYS[1], life)
end

local function keep()
  for _, key in ipairs({'nodes', 'cuts', 'block:' .. name, 'snap:' .. name}) do
    redis.call('PEXPIRE', prefix .. key, ttl_ms)
  end
end

local function field(joined, i) return string.sub(joined, 16 * i - 15, 16 * i) end
"""

# Then: block hashes joined, msgpack of their entries, snapshot hashes joined, msgpack of theirs, hashes joined of
# blocks that got a child and are not among these.
WRITE = (
    _WRITE
    + """
redis.call('SADD', KEYS[1], name)
local blocks, snapshots = cmsgpack.unpack(ARGV[7]), cmsgpack.unpack(ARGV[9])
for i, given in ipairs(blocks) do
  if given[5] == 0 then  -- the end of what is written: it may have got its children before
    local packed = redis.call('HGET', prefix .. 'block:' .. name, field(ARGV[6], i))
    if packed then given[5] = cmsgpack.unpack(packed)[5] end
  end
  redis.call('HSET', prefix .. 'block:' .. name, field(ARGV[6], i), cmsgpack.pack(given))
end
for i, given in ipairs(snapshots) do
  redis.call('HSET', prefix .. 'snap:' .. name, field(ARGV[8], i), cmsgpack.pack(given))
  local held = holders(field(ARGV[8], i))
  held[name] = given[2]
  redis.call('HSET', prefix .. 'cuts', field(ARGV[8], i), cmsgpack.pack(held))
end
for i = 1, #ARGV[10] / 16 do trace(field(ARGV[10], i), 'p') end
keep()
"""
)

# Then: block hashes joined, snapshot hashes joined.
REMOVE = (
    _WRITE
    + """
for i = 1, #ARGV[7] / 16 do drop_snapshot(name, field(ARGV[7], i)) end
for i = 1, #ARGV[6] / 16 do
  local packed = redis.call('HGET', prefix .. 'block:' .. name, field(ARGV[6], i))
  if packed then
    trace(field(ARGV[6], i), cmsgpack.unpack(packed)[5] == 1 and 'bp' or 'b')
    redis.call('HDEL', prefix .. 'block:' .. name, field(ARGV[6], i))
  end
end
"""
)

FORGET = _WRITE + "drop_life(name)"

# Returns whether this life's blocks, and its snapshots, are still there. A life that nobody has renewed for half of
# its keys' time is taken out, at most one a call.
RENEW = (
    _WRITE
    + """
local blocks = redis.call('EXISTS', prefix .. 'block:' .. name)
local snapshots = redis.call('EXISTS', prefix .. 'snap:' .. name)
if blocks + snapshots > 0 then redis.call('SADD', KEYS[1], name) end
if redis.call('EXISTS', prefix .. 'cuts') == 0 then snapshots = 0 end
keep()
for _, life in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local left = math.max(redis.call('PTTL', prefix .. 'block:' .. life), redis.call('PTTL', prefix .. 'snap:' .. life))
  if life ~= name and 2 * left < ttl_ms then
    drop_life(life)
    break
  end
end
return {blocks, snapshots}
"""
)

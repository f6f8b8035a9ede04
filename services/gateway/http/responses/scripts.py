"""Lua scripts that change kept responses and conversations in one step.

KEYS are the index and the sizes of a tenant; ARGV[1] is the prefix of its keys, ARGV[2] the lifetime in milliseconds.
An object may have a list of events; its size is that of both. The index and the sizes never say less than there is:
what has expired is forgotten at the next write.
"""

from __future__ import annotations

_COMMON = """
local index, sizes, prefix, life = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function forget(id)
  -- first: a full Redis lets nothing but deletions begin
  local deleted = redis.call('DEL', prefix .. id, prefix .. id .. ':events')
  redis.call('ZREM', index, id)
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HDEL', sizes, id)
    redis.call('HINCRBY', sizes, 'total', '-' .. size)
  end
  return deleted > 0 and 1 or 0
end
"""

# ARGV: 3 id, 4 the object, 5 the most bytes of all, 6 the most objects, 7 SHA-1 of the object that it replaces, or
# empty.
# -1 when Redis itself is too full: leases also need room. -2 when another object is there, or none.
KEEP = (
    _COMMON
    + """
local id, data, room, most, key = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), prefix .. ARGV[3]
local former = redis.call('GET', key)
if ARGV[7] ~= '' and not (former and redis.sha1hex(former) == ARGV[7]) then return -2 end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now - life, 'LIMIT', 0, 100)) do forget(old) end
local info, freed = redis.pcall('INFO', 'memory'), 0
if type(info) == 'string' then
  local used = tonumber(string.match(info, 'used_memory:(%d+)'))
  local most = tonumber(string.match(info, 'maxmemory:(%d+)'))
  if most > 0 and used + 2 * #data > 0.75 * most then
    while freed < 2 * #data do
      local oldest = redis.call('ZRANGE', index, 0, 0)[1]
      if not oldest then return -1 end
      freed = freed + tonumber(redis.call('HGET', sizes, oldest) or 0)
      forget(oldest)
    end
  end
end
local grown = #data - (former and #former or 0)
redis.call('SET', key, data, 'PX', life)
redis.call('ZADD', index, now, id)
redis.call('HINCRBY', sizes, id, grown)
local total = redis.call('HINCRBY', sizes, 'total', grown)
while total > room or redis.call('ZCARD', index) > most do
  local oldest = redis.call('ZRANGE', index, 0, 0)[1]
  if oldest == id then break end
  forget(oldest)
  total = tonumber(redis.call('HGET', sizes, 'total'))
end
redis.call('PEXPIRE', index, life)
redis.call('PEXPIRE', sizes, life)
return total
"""
)

# ARGV: 3 and on: ids. What is read for the next turn lives on.
USE = (
    _COMMON
    + """
local found = {}
for at = 3, #ARGV do
  local key = prefix .. ARGV[at]
  found[#found + 1] = redis.call('GET', key)
  if found[#found] then
    redis.call('PEXPIRE', key, life)
    redis.call('ZADD', index, 'XX', now, ARGV[at])
  end
end
redis.call('PEXPIRE', index, life)
redis.call('PEXPIRE', sizes, life)
return found
"""
)

# ARGV: 3 id.
FORGET = _COMMON + "return forget(ARGV[3])"

# KEYS: 3 owners of jobs. ARGV: 3 id, 4 member of its job, 5 owner of the job or empty, 6 the most bytes of an object
# with its events, then events. Returns the number of events; -1 when they are too large, false when the job or the
# object is lost.
RECORD = (
    _COMMON
    + """
local id, list, size = ARGV[3], prefix .. ARGV[3] .. ':events', 0
if ARGV[5] ~= '' and redis.call('HGET', KEYS[3], ARGV[4]) ~= ARGV[5] then return false end
if redis.call('EXISTS', prefix .. id) == 0 then return false end
for i = 7, #ARGV do size = size + #ARGV[i] end
if tonumber(redis.call('HGET', sizes, id) or 0) + size > tonumber(ARGV[6]) then return -1 end
for i = 7, #ARGV do redis.call('RPUSH', list, ARGV[i]) end
redis.call('PEXPIRE', list, life)
redis.call('HINCRBY', sizes, id, size)
redis.call('HINCRBY', sizes, 'total', size)
return redis.call('LLEN', list)
"""
)

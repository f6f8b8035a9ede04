"""Lua scripts that change kept responses in one step.

KEYS are the index and the sizes of a tenant; ARGV[1] is the prefix of its responses' keys, ARGV[2] the lifetime in
milliseconds. The index and the sizes never say less than there is: what has expired is forgotten at the next write.
"""

from __future__ import annotations

_COMMON = """
local index, sizes, prefix, life = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function forget(id)
  local deleted = redis.call('DEL', prefix .. id) -- first: a full Redis lets nothing but deletions begin
  redis.call('ZREM', index, id)
  local size = redis.call('HGET', sizes, id)
  if size then
    redis.call('HDEL', sizes, id)
    redis.call('HINCRBY', sizes, 'total', '-' .. size)
  end
  return deleted
end
"""

# ARGV: 3 id, 4 the response, 5 the most bytes of all. Negative when Redis itself is too full: leases also need room.
KEEP = (
    _COMMON
    + """
local id, data, room = ARGV[3], ARGV[4], tonumber(ARGV[5])
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
redis.call('SET', prefix .. id, data, 'PX', life)
redis.call('ZADD', index, now, id)
redis.call('HSET', sizes, id, #data)
local total = redis.call('HINCRBY', sizes, 'total', #data)
while total > room do
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

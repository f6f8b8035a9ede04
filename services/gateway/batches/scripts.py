"""Redis scripts for files, and for the lines of batches, on top of the queue of jobs.

A line is written only if its bit is not set: it is written once, however many gateways computed it.
"""

from __future__ import annotations

from services.common.jobs.scripts import HELD, NOW, TURN_FUNCTION

_USED = (
    NOW
    + """
local function used(key, field) return tonumber(redis.call('HGET', key, field) or 0) end
local function add(list, sizes, usage, ends, member, tenant, data, life)
  redis.call('RPUSH', list, data)
  redis.call('HINCRBY', sizes, member, #data)
  redis.call('HINCRBY', usage, tenant, #data)
  redis.call('HINCRBY', usage, 'total', #data)
  redis.call('ZADD', ends, now() + life, member)
end
"""
)

# Keys: chunks, sizes, usage, ends. Arguments: member, tenant's field, limit of the tenant, of all tenants, life, data.
APPEND = (
    _USED
    + """
if used(KEYS[3], ARGV[2]) + #ARGV[6] > tonumber(ARGV[3]) then return 'tenant' end
if used(KEYS[3], 'total') + #ARGV[6] > tonumber(ARGV[4]) then return 'total' end
add(KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1], ARGV[2], ARGV[6], ARGV[5])
return 'ok'
"""
)

# Keys: index, ends. Arguments: id, its JSON, member, life, most files.
PUBLISH = """
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then return 0 end
local clock = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], clock[1] + ARGV[4], ARGV[3])
return 1
"""

# Keys: index, chunks, sizes, usage, ends. Arguments: id, member, tenant's field, whether to remove only if expired.
REMOVE = (
    _USED
    + """
local ending = tonumber(redis.call('ZSCORE', KEYS[5], ARGV[2]) or 0)
if ARGV[4] == '1' and ending > now() then return 0 end
local size = tonumber(redis.call('HGET', KEYS[3], ARGV[2]) or 0)
if size > 0 then
  redis.call('HINCRBY', KEYS[4], ARGV[3], -size)
  redis.call('HINCRBY', KEYS[4], 'total', -size)
end
redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('ZREM', KEYS[5], ARGV[2])
redis.call('DEL', KEYS[2])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
)

# Keys: ends. Arguments: the most to return.
EXPIRED = """
local clock = redis.call('TIME')
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', clock[1], 'LIMIT', 0, ARGV[1])
"""

# How batches are claimed: one that has to be ended goes first; a gateway without room claims no others.
# Argument: whether there is room.
CHOICE = """
local function place(job, status)
  local ending = redis.call('HGET', job, 'expires_at')
  if status == 'cancelling' or tonumber(ending) <= now() then return 'first' end
  return ARGV[4] == '1' and 'fair'
end
local function take(job) end
"""

# Keys: owners, batch, bits, sizes, usage, ends, pieces of output and errors. Arguments: member, owner, tenant's field,
# limit of the tenant, of all tenants, life, members of output and errors, tokens (input, cached, output), then for each
# line its number, `completed` or `failed`, and its data.
RECORD = (
    _USED
    + HELD
    + """
local status = held({'', KEYS[1], KEYS[2]}, ARGV)
if not status then return false end
local bytes = 0
for i = 12, #ARGV, 3 do bytes = bytes + #ARGV[i + 2] end
if used(KEYS[5], ARGV[3]) + bytes > tonumber(ARGV[4]) or used(KEYS[5], 'total') + bytes > tonumber(ARGV[5]) then
  return 'full'
end
for i = 12, #ARGV, 3 do
  if redis.call('SETBIT', KEYS[3], ARGV[i], 1) == 0 then
    local list, member = KEYS[7], ARGV[7]
    if ARGV[i + 1] == 'failed' then list, member = KEYS[8], ARGV[8] end
    add(list, KEYS[4], KEYS[5], KEYS[6], member, ARGV[3], ARGV[i + 2], ARGV[6])
    redis.call('HINCRBY', KEYS[2], ARGV[i + 1], 1)
    if i == 12 then
      redis.call('HINCRBY', KEYS[2], 'input_tokens', ARGV[9])
      redis.call('HINCRBY', KEYS[2], 'cached_tokens', ARGV[10])
      redis.call('HINCRBY', KEYS[2], 'output_tokens', ARGV[11])
    end
  end
end
return {1, status}
"""
)

# Keys and arguments: bits, index of files, sizes, ends; how long a file is kept, then for each of the two files its id,
# its member and its JSON up to the size; then those of TURN.
FINISH = (
    TURN_FUNCTION
    + """
local keys, args = {unpack(KEYS, 5)}, {unpack(ARGV, 8)}
if not held(keys, args) then return false end
for i = 2, 5, 3 do
  local size = redis.call('HGET', KEYS[3], ARGV[i + 1])
  if size then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 2] .. size .. '}')
    redis.call('ZADD', KEYS[4], now() + ARGV[1], ARGV[i + 1])
  end
end
redis.call('DEL', KEYS[1])
return turn(keys, args)
"""
)

"""Redis scripts for operations that must be atomic. They use Redis's clock, since machines' clocks differ.

An owner claims a job for the length of a lease. Once another owner has claimed the job, writes of the first one are
refused. A line is written only if its bit is not set: it is written once, however many gateways computed it.
"""

from __future__ import annotations

_USED = """
local function used(key, field) return tonumber(redis.call('HGET', key, field) or 0) end
local function now() local clock = redis.call('TIME'); return clock[1] + clock[2] / 1e6 end
local function add(list, sizes, usage, ends, member, tenant, data, life)
  redis.call('RPUSH', list, data)
  redis.call('HINCRBY', sizes, member, #data)
  redis.call('HINCRBY', usage, tenant, #data)
  redis.call('HINCRBY', usage, 'total', #data)
  redis.call('ZADD', ends, now() + life, member)
end
"""

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

# Keys: index, queue, batch. Arguments: id, member, most open ones per tenant, most kept, then fields and values.
CREATE = """
local open = 0
for _, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  if member:match('^(.*):') == ARGV[2]:match('^(.*):') then open = open + 1 end
end
if open >= tonumber(ARGV[3]) then return 0 end
local clock = redis.call('TIME')
redis.call('ZADD', KEYS[1], clock[1], ARGV[1])
redis.call('ZADD', KEYS[2], clock[1] + clock[2] / 1e6, ARGV[2])
redis.call('HSET', KEYS[3], unpack(ARGV, 5))
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - tonumber(ARGV[4]))
return 1
"""

# The tenant with the fewest running jobs goes first. A gateway without room claims only jobs that have to be ended.
# Keys: queue, owners. Arguments: owner, lease, whether there is room, prefix of batches.
CLAIM = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local listed, running, free = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'), {}, {}
for i = 1, #listed, 2 do
  local tenant = listed[i]:match('^(.*):')
  if tonumber(listed[i + 1]) > now then
    running[tenant] = (running[tenant] or 0) + 1
  else
    free[#free + 1] = {listed[i], tenant}
  end
end
local chosen, fewest
for _, job in ipairs(free) do
  local status, ending = unpack(redis.call('HMGET', ARGV[4] .. job[1], 'status', 'expires_at'))
  local count = running[job[2]] or 0
  if not status then
    redis.call('ZREM', KEYS[1], job[1])
    redis.call('HDEL', KEYS[2], job[1])
  elseif status == 'cancelling' or tonumber(ending) <= now then
    chosen = job[1]
    break
  elseif ARGV[3] == '1' and (not fewest or count < fewest) then
    chosen, fewest = job[1], count
  end
end
if not chosen then return false end
redis.call('ZADD', KEYS[1], now + ARGV[2], chosen)
redis.call('HSET', KEYS[2], chosen, ARGV[1])
return chosen
"""

# Keys: queue, owners, batch. Arguments: member, owner, lease; 0 releases the job. Returns its status.
RENEW = """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 'lost' end
local clock = redis.call('TIME')
redis.call('ZADD', KEYS[1], 'XX', clock[1] + clock[2] / 1e6 + ARGV[3], ARGV[1])
if ARGV[3] == '0' then redis.call('HDEL', KEYS[2], ARGV[1]) end
return redis.call('HGET', KEYS[3], 'status') or 'lost'
"""

# Keys: owners, batch. Arguments: member, owner, status before, status after, then fields and values.
ADVANCE = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 'lost' end
local status = redis.call('HGET', KEYS[2], 'status')
if status ~= ARGV[3] then return status or 'lost' end
redis.call('HSET', KEYS[2], 'status', ARGV[4], unpack(ARGV, 5))
return ARGV[4]
"""

# Keys: owners, batch, bits, sizes, usage, ends, pieces of output and errors. Arguments: member, owner, tenant's field,
# limit of the tenant, of all tenants, life, members of output and errors, tokens (input, cached, output), then for each
# line its number, `completed` or `failed`, and its data.
RECORD = (
    _USED
    + """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 'lost' end
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
return redis.call('HGET', KEYS[2], 'status')
"""
)

# Keys: owners, batch, queue, bits, index of files, sizes, ends. Arguments: member, owner, how long the batch is kept,
# then for each of the two files its id, its member and its JSON up to the size; then fields and values.
FINISH = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 'lost' end
local clock = redis.call('TIME')
for i = 4, 7, 3 do
  local size = redis.call('HGET', KEYS[6], ARGV[i + 1])
  if size then
    redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 2] .. size .. '}')
    redis.call('ZADD', KEYS[7], clock[1] + ARGV[3], ARGV[i + 1])
  end
end
redis.call('HSET', KEYS[2], unpack(ARGV, 10))
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('DEL', KEYS[4])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[1])
return 'ok'
"""

# Keys: batch, queue. Arguments: member, time. The next gateway that claims a job without an owner ends it.
CANCEL = """
local status = redis.call('HGET', KEYS[1], 'status')
if status == 'validating' or status == 'in_progress' then
  redis.call('HSET', KEYS[1], 'status', 'cancelling', 'cancelling_at', ARGV[2])
  return 'cancelling'
end
return status
"""

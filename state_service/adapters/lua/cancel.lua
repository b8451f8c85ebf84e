-- cancel.lua: ask the holder of a conversation's lock to stop; its next heartbeat (lease.lua) brings it the
-- reason. The first reason stays. A lock that another run holds, or nobody, is left alone.
--
-- KEYS    1 lock
-- ARGV    1 run  2 reason
-- Returns 1 asked (now or before), 0 the run holds no lock

if string.sub(KEYS[1] or '', -5) ~= ':lock' or (ARGV[1] or '') == '' or (ARGV[2] or '') == '' then
  return redis.error_reply('INPUT lock key, run or reason')
end
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return 0 end
if kind ~= 'hash' then return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' holds a ' .. kind) end
if redis.call('HGET', KEYS[1], 'run') ~= ARGV[1] then return 0 end
redis.call('HSETNX', KEYS[1], 'cancel', ARGV[2])
return 1

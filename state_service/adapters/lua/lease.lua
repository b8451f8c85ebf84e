-- lease.lua: the heartbeat of a turn's lock: extend it if it is still this turn's, by run and token.
--
-- KEYS    1 lock
-- ARGV    1 run  2 token  3 lease_ms
-- Returns { 1 held or 0 not, reason of a cancel that was asked for elsewhere or '' }

local lease = string.find(ARGV[3] or '', '^%d+$') and tonumber(ARGV[3])
if string.sub(KEYS[1] or '', -5) ~= ':lock' or not ARGV[1] or ARGV[1] == '' then
  return redis.error_reply('INPUT lock key or run')
end
if not lease or lease < 1 or lease > 86400000 then return redis.error_reply('INPUT lease') end
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'none' then return { 0, '' } end
if kind ~= 'hash' then return redis.error_reply('WRONGTYPE ' .. KEYS[1] .. ' holds a ' .. kind) end

local held = redis.call('HMGET', KEYS[1], 'run', 'token', 'cancel')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return { 0, '' } end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return { 1, held[3] or '' }

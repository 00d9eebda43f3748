-- The trigger function by which a server refuses keys that are not its own. The engine makes no trigger: which keys are whose, only
-- the application knows. It writes the trigger, with a condition on NEW.key.
--
-- Tokens are granted by writing rows, so no grant passes the trigger, whatever the call. It is an AFTER trigger: a BEFORE trigger
-- would lock the row before the UPDATE does, and would also see the rows that ON CONFLICT DO NOTHING does not insert. It is not a
-- CHECK: the DETAIL of a CHECK's error has the row, and so the key, and its error cannot say what to do.
CREATE OR REPLACE FUNCTION ratelimit.refuse() RETURNS trigger
LANGUAGE plpgsql
AS $body$
BEGIN
    -- The message has no key: it may be personal data, and errors are logged.
    RAISE SQLSTATE 'RL004' USING
        MESSAGE = pg_catalog.format('rate limit %L: the key does not belong to this server', NEW.name),
        HINT = pg_catalog.format('Send the call to the server that has the key: see which server or which sharding key the caller gave to the router. If the key belongs here, correct the condition of the trigger %I.', TG_NAME);
END
$body$;

COMMENT ON FUNCTION ratelimit.refuse() IS $text$
Refuses keys that do not belong to this server, one of several between which the keys are shared out. Without it, a call that reaches
the wrong server finds a full limit there, and is granted. Each server gets a trigger of its own, with a condition that is true for
keys that are not its own:

    CREATE TRIGGER limits_guard AFTER INSERT OR UPDATE ON ratelimit.limits FOR EACH ROW
        WHEN (NOT starts_with(NEW.key, 'eu|')) EXECUTE FUNCTION ratelimit.refuse()

    -- the third of four servers, which share keys by their hash
        WHEN (hashtextextended(NEW.key, 0) & 3 <> 2)

The trigger sees what is written from then on. Rows that were there before stay: delete those of other servers' keys.

Errors:
  RL004    the key is not this server's. Nothing was taken, and the transaction is aborted
$text$;

-- Gives a role what its work needs. Three words are enough: who looks, who consumes, who operates. The owner of the schema calls it.
--
-- The functions with the rights of their owner change rows of the history. So they are for operators alone.
CREATE OR REPLACE FUNCTION ratelimit.grant(role name, work text) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $body$
DECLARE
    own regnamespace := (SELECT c.relnamespace FROM pg_class AS c WHERE c.oid = 'ratelimit.limits'::regclass);
    f   regprocedure;
BEGIN
    IF (work IN ('look', 'consume', 'operate')) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING MESSAGE = 'work must be look, consume or operate, not ' || coalesce(quote_literal(work), 'NULL');
    END IF;
    IF role = 'public' THEN
        RAISE invalid_parameter_value USING MESSAGE = 'role must be a role: everybody may not use a limit';
    END IF;
    FOR f IN SELECT p.oid FROM pg_proc AS p WHERE p.pronamespace = own LOOP -- which a restore without privileges gives to everybody
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f);
    END LOOP;
    EXECUTE format('GRANT USAGE ON SCHEMA %s TO %I', own, role);
    FOR f IN SELECT p.oid FROM pg_proc AS p WHERE p.pronamespace = own AND p.proname <> 'grant' AND (NOT p.prosecdef OR work = 'operate') LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', f, role);
    END LOOP;
    EXECUTE format('GRANT SELECT ON ratelimit.limits, ratelimit.holds, ratelimit.definitions, ratelimit.overrides, ratelimit.usage, ratelimit.denials TO %I', role);
    IF work = 'consume' THEN
        EXECUTE format('GRANT INSERT, UPDATE, DELETE ON ratelimit.limits, ratelimit.holds, ratelimit.definitions, ratelimit.usage, ratelimit.denials TO %I', role);
        EXECUTE format('GRANT SELECT, INSERT, UPDATE ON ratelimit.sweeps TO %I', role);
        FOR n IN 0..31 LOOP -- Hot locks them
            EXECUTE format('GRANT UPDATE ON ratelimit.turn_%s TO %I', to_char(n, 'FM00'), role);
        END LOOP;
    ELSIF work = 'operate' THEN
        EXECUTE format('GRANT INSERT (name, key, effect, rate, capacity, max_reserved, until, reason, made_by) ON ratelimit.overrides TO %I', role);
        EXECUTE format('GRANT UPDATE, DELETE ON ratelimit.limits, ratelimit.holds TO %I', role);
    END IF;
END
$body$;

COMMENT ON FUNCTION ratelimit.grant(name, text) IS $text$
Give a role what its work needs: USAGE on the schema, and the functions and tables.

    SELECT ratelimit.grant('app', 'consume')

Arguments:
  role  the role
  work  'look'     reads limits, keys, holds, overrides and usage: Check, ratelimit.keys, a page that only reads
        'consume'  what a program needs, with all that Open does. It may not override
        'operate'  looks, and overrides, blocks, restores, resets, releases and sweeps

Roles that were granted may also use the functions that later migrations make. docs/security.md says what each of them can do, and how to take it back
$text$;

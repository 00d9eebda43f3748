-- +goose Up

-- The locks with which transactions of several processes queue for a hot limit (Limiter.InTx with Hot): the first statement
-- of a transaction is LOCK TABLE on the view that belongs to the limit and key, and the lock lasts until the transaction ends.
--
-- Why not an advisory lock: a session's would stay behind on a connection that a transaction pooler has handed to somebody
-- else, and a transaction's is taken by a SELECT, whose snapshot would be older than the lock, so that what the transaction
-- before has committed is a conflict. LOCK TABLE takes no snapshot.
--
-- Views, because they have no storage and nothing is ever done to them, and many, so that different limits seldom meet.
-- LOCK TABLE needs UPDATE on them, which allows nothing else.
-- +goose StatementBegin
DO $install$
DECLARE
    turn text;
BEGIN
    FOR n IN 0..31 LOOP
        turn := pg_catalog.format('%I.%I', current_schema(), 'rate_limits_turn_' || to_char(n, 'FM00'));
        EXECUTE pg_catalog.format('CREATE VIEW %s AS SELECT NULL AS nothing', turn);
        EXECUTE pg_catalog.format('COMMENT ON VIEW %s IS %L', turn, 'txlimit: locked by transactions that queue for a hot limit');
    END LOOP;
END
$install$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
DO $remove$
BEGIN
    FOR n IN 0..31 LOOP
        EXECUTE format('DROP VIEW rate_limits_turn_%s', to_char(n, 'FM00'));
    END LOOP;
END
$remove$;
-- +goose StatementEnd

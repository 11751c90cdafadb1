-- The roles of compose.yaml.  The owner makes the schema, and `outbox migrate` grants the others
-- what they need in it: none of them is a superuser.
CREATE ROLE outbox_owner LOGIN PASSWORD 'password';
CREATE ROLE outbox_relay LOGIN PASSWORD 'password';
CREATE ROLE outbox_api LOGIN PASSWORD 'password';
CREATE ROLE outbox_operator LOGIN PASSWORD 'password';
DO $$
BEGIN
    EXECUTE format('GRANT CREATE ON DATABASE %I TO outbox_owner', current_database());
END
$$;

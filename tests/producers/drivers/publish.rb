# Publishes with pg; libpq's variables name the database.
require "json"
require "pg"

connection = PG.connect
failures = []
JSON.parse($stdin.read)["statements"].each do |statement|
  connection.exec_params(statement["text"], statement["arguments"])
rescue PG::Error => error
  failures << "#{statement["name"]}: #{error.message}"
end
puts failures.to_json

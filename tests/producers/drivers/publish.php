<?php
// Publishes with PDO; libpq's variables name the database.
['statements' => $statements, 'driver' => $driver] = json_decode(stream_get_contents(STDIN), true);
$connection = new PDO('pgsql:', null, null, [
    PDO::ATTR_EMULATE_PREPARES => $driver === 'PDO, emulated',
    PDO::ATTR_ERRMODE => PDO::ERRMODE_EXCEPTION,
]);
$failures = [];
foreach ($statements as ['name' => $name, 'text' => $text, 'arguments' => $arguments]) {
    try {
        $connection->prepare(preg_replace('/\$\d+/', '?', $text))->execute($arguments);
    } catch (PDOException $error) {
        $failures[] = "$name: " . $error->getMessage();
    }
}
echo json_encode($failures);

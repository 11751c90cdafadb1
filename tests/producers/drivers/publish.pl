# Publishes with DBD::Pg; libpq's variables name the database.
use strict;
use warnings;
use DBI;
use JSON::PP;

my $given = decode_json(do { local $/; <STDIN> });
my $connection = DBI->connect("dbi:Pg:", undef, undef, { RaiseError => 1, PrintError => 0 });
my @failures;
for my $statement (@{ $given->{statements} }) {
    eval {
        my $prepared = $connection->prepare($statement->{text});
        $prepared->execute(@{ $statement->{arguments} });
        1;
    } or push @failures, "$statement->{name}: $@";
}
print encode_json(\@failures);

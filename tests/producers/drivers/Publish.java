import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.SQLException;

/** Publishes with JDBC: the URL, and for each statement its name, its text and its arguments. */
public class Publish {
    public static void main(String[] given) throws SQLException {
        StringBuilder failures = new StringBuilder();
        try (Connection connection = DriverManager.getConnection(given[0])) {
            for (int n = 1; n < given.length; n += 5) {
                String text = given[n + 1].replaceAll("\\$\\d+", "?");
                try (PreparedStatement statement = connection.prepareStatement(text)) {
                    for (int parameter = 1; parameter <= 3; parameter++) {
                        statement.setString(parameter, given[n + 1 + parameter]);
                    }
                    statement.execute();
                } catch (SQLException error) {
                    String message = error.getMessage().replace('\n', ' ');
                    failures.append(given[n]).append(": ").append(message).append('\n');
                }
            }
        }
        System.out.print(failures);
    }
}

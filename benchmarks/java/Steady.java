import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * The unmodified Java producer with its default settings, one send after the other, for failover.py. `send` sends until the
 * next line comes; a JSON line for each: when it began, when it ended (ms since 1970), its number, and what came of it.
 */
public final class Steady {
    private static final PrintStream OUT = System.out;

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            Map<String, String> options = new HashMap<>();
            for (int i = 1; i < words.length; i++) {
                int equals = words[i].indexOf('=');
                options.put(words[i].substring(0, equals), java.net.URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
            }
            if (words[0].equals("send")) {
                send(options, lines);
            }
            OUT.println("{\"event\": \"done\"}");
            OUT.flush();
        }
        System.exit(0);
    }

    private static void send(Map<String, String> options, BufferedReader lines) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("steady");
        producer.setNamesrvAddr(options.get("ns"));
        producer.start();
        long pause = Long.parseLong(options.get("pause_ms"));
        for (long number = 0; !lines.ready(); number++) {
            long began = System.currentTimeMillis();
            String status;
            try {
                SendResult result = producer.send(new Message(options.get("topic"), ("java-" + number).getBytes("UTF-8")));
                status = result.getSendStatus() == SendStatus.SEND_OK ? "" : result.getSendStatus().name();
            } catch (Exception error) {
                status = String.valueOf(error).replaceAll("[\"\\\\\n\r]", " ");
                status = status.substring(0, Math.min(status.length(), 300));
            }
            OUT.println("{\"event\": \"sent\", \"number\": " + number + ", \"began\": " + began + ", \"ended\": "
                + System.currentTimeMillis() + ", \"failure\": \"" + status + "\"}");
            OUT.flush();
            Thread.sleep(pause);
        }
        producer.shutdown();
    }
}
